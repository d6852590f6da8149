NEEDS = ("agents",)
