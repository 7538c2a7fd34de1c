"""Pictures of a :class:`ds_vpipe.timeline.Timeline`: text, SVG, PNG, Chrome trace, HTML report."""
