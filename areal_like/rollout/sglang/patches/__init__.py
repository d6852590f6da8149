"""Changes of SGLang 0.5.17, one in each file, each with its reason and a PATCH (`patch.py`).

Only these files, `launcher.py` and files `sglang.py` of capabilities import SGLang, and only in functions: the
controller imports the files for their options. Modules of `inside/` import SGLang at their top.
"""
