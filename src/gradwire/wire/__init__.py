"""One rank's end of the group: the communication thread ("lane"), what ranks agree on, how they meet and tell of failure."""
