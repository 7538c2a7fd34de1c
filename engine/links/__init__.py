"""Messages between stages: format, links, process groups, agreements."""
