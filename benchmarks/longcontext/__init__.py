"""RAPID behind long prompts."""
