"""The episode viewer: a local web page over a run's episode log. ``envgrad view RUN`` starts it.

::

    source.py   a run's log as the data that the page asks for; the one file that knows ``EpisodeReader``
    pieces.py   token ids -> the text of each token
    app.py      routes, and what keeps others out: a secret in the address, known host names, a strict page policy
    serve.py    address, port, and the server itself
    static/     the page: HTML, CSS and JavaScript modules as they are, without a build step
"""
