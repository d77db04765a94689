"""Knowledge bases over HTTP: searched, filled by uploads, indexed by jobs in a process of their own."""
