"""Files to passages: text from whatever format, documents, and chunks as long as an encoder reads."""
