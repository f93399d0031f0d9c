from hypothesis import settings

# A busy machine is no failure, and what fails once must fail again.
settings.register_profile("swarm", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("swarm")
