"""Schedulers of serving engines, a module each: a class with one method (`engine.Scheduler`)."""
