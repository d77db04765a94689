"""Knowledge bases over HTTP: searched, filled by uploads, and indexed by jobs in a separate process."""
