"""What it takes to operate the application: keys, limits, queues, log, metrics, health."""
