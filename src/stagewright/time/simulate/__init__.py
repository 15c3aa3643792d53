"""When every task of a program runs: issue order, timelines, and where the time goes."""
