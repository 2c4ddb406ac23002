"""Planning a draft before anything is run: what it will weigh, take and cost, each number with its formula.

formula.py makes a line (name, formula, values, result); draft.py, features.py, extraction.py, training.py say what is
counted; whole.py puts a plan together, warnings.py reads it. target.py knows targets of which only a config is at hand,
calibrate.py times the real code here, synthetic.py writes states that nobody computed, for a dry run at full width.
"""
