"""What an app is given of a bundle: sources and layouts that a person can read, build and keep."""
