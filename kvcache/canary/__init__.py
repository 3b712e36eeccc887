"""Trial runs of a substrate on this machine, each in a process of its own: whatever goes wrong
there, a crash and a hang included, is a result here."""
