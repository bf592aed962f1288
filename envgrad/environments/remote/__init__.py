"""Environments that live in processes of their own: another interpreter's, or one more of this one.

``wire``: what goes over the socket. ``server``: the process that has imported the environment and forks one process
per instance. ``instance``: that process. ``client``: what stands for it here, an ordinary environment.
"""
