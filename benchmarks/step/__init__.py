"""The parts of benchmarks/train_step.py: works, features in three layouts, environments of the peers, rows."""
