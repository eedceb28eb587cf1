// An empty Python module: importing it loads libtskernel_ops.so, which it is linked to and which knows nothing of
// Python.
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "The native ops of tskernel.", -1, 0};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
