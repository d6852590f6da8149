"""Worker processes that run code of users."""
