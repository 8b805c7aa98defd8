"""Models behind HTTP: translations, texts and their attention (`regard serve`).

`settings` has the limits, `shapes` the questions and answers, `application` the addresses. A `worker`
(one thread for each model) takes each request to a `served` model; `guard` stands before all of it, and `server` runs
it.
"""
