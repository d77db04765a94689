"""What a newcomer has: 30 documents of a made-up firm, and 60 questions about them."""
