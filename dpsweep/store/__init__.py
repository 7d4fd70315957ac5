"""The durable state of a sweep: its study, its folder, and who may drive it."""
