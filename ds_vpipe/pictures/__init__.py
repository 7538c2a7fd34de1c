"""Pictures of a :class:`ds_vpipe.timelines.timeline.Timeline`: text, SVG, PNG, Chrome trace, HTML report."""
