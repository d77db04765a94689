"""From files to passages: text from many formats, documents, and chunks short enough for an encoder."""
