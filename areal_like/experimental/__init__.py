"""Features that work and are tested, but that no user has needed yet; they may change or be removed."""
