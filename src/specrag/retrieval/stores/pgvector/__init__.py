"""A knowledge base in PostgreSQL with the pgvector extension."""
