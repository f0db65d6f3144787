"""The browser page: the kernels of the WebGPU backend, checked, measured and looked at on the visitor's own GPU.

Python knows how an op is cut into dispatches, and so the page holds no such knowledge: the ordinary ops are run once on a
device that computes nothing and writes down what it is told (`recording`), and the page does what was written down.

``recording.py``   the device that records, and what a program is
``tiers.py``       kinds of browsers' GPUs that programs are recorded for
``checks.py``      cases of every op with golden results and the error budget
``measures.py``    programs of real sizes, to be timed
``maps.py``        the attention maps of a demo
``site.py``        all of it, written as a folder of static files
``server.py``      such a folder, served to this machine
``page/``          the page itself: plain HTML, CSS and JavaScript modules
"""
