"""What candidates of a search have in common, made once.

In: runs. Out: what functions make of them (`settings_read.BySettingsRead`), such as the blocks of
their stages (`plans.stage_plan`), also with numbers of many (`tuples.Shared`); and actions
(`played.Played`).
"""
