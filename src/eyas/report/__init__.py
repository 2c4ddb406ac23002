"""Reports: text for a terminal, pages for a browser. Nothing here measures anything."""
