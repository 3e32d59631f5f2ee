"""Reports: traces, networks, plans, timelines and results of commands as terminal tables, plots and an HTML page."""
