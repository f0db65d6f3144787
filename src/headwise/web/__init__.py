"""The browser page: the kernels of the WebGPU backend, checked and measured on the visitor's own GPU.

The page does not know how an op is divided into dispatches. The ordinary ops are run once in Python on a device that
computes nothing and records its commands (`recording`), and the page repeats them.

``recording.py``   the device that records, and what a program is
``tiers.py``       the kinds of GPUs that programs are recorded for
``checks.py``      cases of every op with golden results and the error budget
``measures.py``    programs of real sizes, to be timed
``maps.py``        the attention maps of a demo
``site.py``        all of it, written as a folder of static files
``server.py``      such a folder, served to this machine
``page/``          the page itself: plain HTML, CSS and JavaScript modules
"""
