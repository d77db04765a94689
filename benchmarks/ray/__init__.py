"""Knowledge bases that a cluster encodes: one worker against two, and a node that is killed in the middle."""
