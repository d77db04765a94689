"""A gateway whose replicas are killed: every answer right, every other request told why."""
