"""Every reader of what others wrote, given damaged and hostile inputs.

Reading order: `child.py` runs one input in a forked child and judges how it ends; `values.py` draws odd values;
`mutate.py` damages a folder, `hostile.py` writes what nobody writes by accident; `corpus.py` makes the whole inputs
that are damaged; `readers.py` lists the readers; `__main__.py` is `make fuzz`, `test_fuzz.py` its short form.

An input is made of a reader's name, a seed and a number, and of nothing else: the same three make the same bytes. What
may come out is success or an error of `instep.errors`; never a signal, a raw traceback, a wait for what does not come,
nor an import, an open or a process whose name the input gave. Time and memory are bounded, and not judged.
"""
