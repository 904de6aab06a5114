"""The web console: the daemon's API for people. Assets are files of this package; nothing is built or fetched."""
