"""The ``specrag`` command: one small file a command, put together in ``main``."""
