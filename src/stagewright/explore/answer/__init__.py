"""The answer of a search: the best of many candidates, how sure that is, and what it hangs on."""
