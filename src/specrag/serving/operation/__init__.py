"""What makes an application fit to be run: keys, limits, queues, log, metrics, health."""
