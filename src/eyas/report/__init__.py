"""Reports: text for a terminal, pages for a browser. Nothing here measures anything."""

REPORTS = ("report.html", "comparison.html")
"""What `eyas report` writes into the folder that it is about."""
