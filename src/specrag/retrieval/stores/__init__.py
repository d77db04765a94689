"""Knowledge bases in external databases."""
