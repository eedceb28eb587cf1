// tskernel._gate: the C++ form of _torch/guard.py and of what _torch/route.py remembers.
//
// It is built against one torch release and one Python, whose tensor layout it reads; ``torch_version`` says which, and
// _torch/native.py leaves it alone with any other. Needs no more than a host compiler.
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/version.h>

#include "memory.h"

#ifdef Py_GIL_DISABLED
#error "tskernel._gate relies on the GIL; the Python gate serves free-threaded builds"
#endif

namespace tskernel {
namespace {

struct MemoryObject {
    PyObject_HEAD;
    vectorcallfunc vectorcall;
    PyObject* miss;
    Memory* memory;
};

MemoryObject* as_memory(PyObject* object) { return reinterpret_cast<MemoryObject*>(object); }

// The arguments are exactly the slots, by position: only generated code calls this.
PyObject* memory_call(PyObject* object, PyObject* const* arguments, size_t flagged, PyObject* keywords) {
    HANDLE_TH_ERRORS
    MemoryObject* self = as_memory(object);
    const size_t count = static_cast<size_t>(PyVectorcall_NARGS(flagged));
    if (count != self->memory->kinds().size() || (keywords != nullptr && PyTuple_GET_SIZE(keywords) != 0)) {
        return PyErr_Format(PyExc_TypeError, "expected %zu arguments by position, got %zu and keywords",
                            self->memory->kinds().size(), count);
    }
    if (const auto plan = self->memory->recall(arguments)) return self->memory->run(*plan, arguments);
    const Object miss = Object::share(self->miss);
    return PyObject_Vectorcall(miss.get(), arguments, count, nullptr);
    END_HANDLE_TH_ERRORS
}

// None or a tuple of tensors.
bool read_outputs(PyObject* value, std::vector<Output>& outputs) {
    if (value == Py_None) return true;
    for (Py_ssize_t i = 0; PyTuple_Check(value) && i < PyTuple_GET_SIZE(value); ++i) {
        PyObject* item = PyTuple_GET_ITEM(value, i);
        if (!THPVariable_CheckExact(item)) {
            PyErr_SetString(PyExc_TypeError, "outputs: expected plain tensors");
            return false;
        }
        outputs.emplace_back(THPVariable_Unpack(item));
    }
    if (outputs.empty() || outputs.size() > kMaxOutputs) {
        PyErr_Format(PyExc_ValueError, "outputs: expected 1 to %zu tensors, got %zu", kMaxOutputs, outputs.size());
        return false;
    }
    return true;
}

PyObject* memory_remember(PyObject* object, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject *slots, *function, *outputs, *device, *sources;
    const char* name;
    if (!PyArg_ParseTuple(given, "O!OOOzO!", &PyTuple_Type, &slots, &function, &outputs, &device, &name, &PyTuple_Type,
                          &sources)) {
        return nullptr;
    }
    Memory& memory = *as_memory(object)->memory;
    if (static_cast<size_t>(PyTuple_GET_SIZE(slots)) != memory.kinds().size()) {
        return PyErr_Format(PyExc_TypeError, "expected %zu slots, got %zd", memory.kinds().size(),
                            PyTuple_GET_SIZE(slots));
    }
    Plan plan;
    plan.function = Object::share(function);
    if (!read_outputs(outputs, plan.outputs)) return nullptr;
    if (THPDevice_Check(device)) plan.device = reinterpret_cast<THPDevice*>(device)->device;
    if (name != nullptr) {
        plan.call = Call::bind(name, sources, memory.kinds(), slots);
        if (PyErr_Occurred()) return nullptr;
        if (!plan.call || plan.call->outputs() != plan.outputs.size()) {
            return PyErr_Format(PyExc_TypeError, "%s: not registered, or not with these arguments and no result", name);
        }
    }
    return PyBool_FromLong(memory.remember(reinterpret_cast<PyTupleObject*>(slots)->ob_item, std::move(plan)));
    END_HANDLE_TH_ERRORS
}

PyObject* memory_forget(PyObject* object, PyObject*) {
    as_memory(object)->memory->clear();
    Py_RETURN_NONE;
}

Py_ssize_t memory_len(PyObject* object) { return static_cast<Py_ssize_t>(as_memory(object)->memory->size()); }

bool kinds_are_valid(const std::string& kinds) {
    size_t tensors = 0;
    bool flags = false;
    for (size_t i = 0; i < kinds.size(); ++i) {
        if (std::strchr("TORNMVX", kinds[i]) == nullptr) return false;
        tensors += is_tensor_kind(static_cast<Kind>(kinds[i]));
        flags = flags || kinds[i] == 'X';
        if (flags && kinds[i] != 'X') return false;  // what is passed on comes first
        if (kinds[i] == 'R' && i + 1 < kinds.size() && kinds[i + 1] != 'X') return false;  // and the buffer last of it
    }
    return kinds.size() <= kMaxSlots && tensors <= kMaxTensors;
}

PyObject* memory_new(PyTypeObject* type, PyObject* given, PyObject*) {
    const char* kinds;
    int front, autocast_rule;
    PyObject* miss;
    if (!PyArg_ParseTuple(given, "sOpp", &kinds, &miss, &front, &autocast_rule)) return nullptr;
    if (!kinds_are_valid(kinds)) return PyErr_Format(PyExc_ValueError, "kinds: cannot serve %s", kinds);
    auto* self = as_memory(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->vectorcall = memory_call;
    self->miss = Py_NewRef(miss);
    self->memory = new Memory(kinds, front != 0, autocast_rule != 0);
    return reinterpret_cast<PyObject*>(self);
}

int memory_traverse(PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(as_memory(object)->miss);
    return as_memory(object)->memory == nullptr ? 0 : as_memory(object)->memory->visit(visit, arg);
}

int memory_clear(PyObject* object) {
    if (as_memory(object)->memory != nullptr) as_memory(object)->memory->clear();
    return 0;
}

void memory_dealloc(PyObject* object) {
    PyObject_GC_UnTrack(object);
    delete std::exchange(as_memory(object)->memory, nullptr);
    Py_CLEAR(as_memory(object)->miss);
    Py_TYPE(object)->tp_free(object);
}

PyMethodDef memory_methods[] = {
    {"remember", memory_remember, METH_VARARGS,
     "remember(slots, function, outputs, device, operator, sources) -> bool"},
    {"forget", memory_forget, METH_NOARGS, "forget() -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PySequenceMethods memory_sequence = {};
PyTypeObject MemoryType = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready_type() {
    memory_sequence.sq_length = memory_len;
    MemoryType.tp_name = "tskernel._gate.Memory";
    MemoryType.tp_doc = "Memory(kinds, miss, front, autocast_rule): calls what served a call like this one, or miss.";
    MemoryType.tp_basicsize = sizeof(MemoryObject);
    MemoryType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    MemoryType.tp_vectorcall_offset = offsetof(MemoryObject, vectorcall);
    MemoryType.tp_call = PyVectorcall_Call;
    MemoryType.tp_new = memory_new;
    MemoryType.tp_traverse = memory_traverse;
    MemoryType.tp_clear = memory_clear;
    MemoryType.tp_dealloc = memory_dealloc;
    MemoryType.tp_methods = memory_methods;
    MemoryType.tp_as_sequence = &memory_sequence;
    return PyType_Ready(&MemoryType) == 0;
}

// needs_dispatcher(autocast_rule, *tensors): None among the tensors is passed over.
PyObject* needs_dispatcher(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (count < 1) return PyErr_Format(PyExc_TypeError, "needs_dispatcher() takes a bool and tensors");
    const bool autocast_rule = arguments[0] == Py_True;
    if (at::impl::torch_function_mode_enabled()) Py_RETURN_TRUE;
    const ThreadState state;
    for (Py_ssize_t i = 1; i < count; ++i) {
        if (arguments[i] == Py_None) continue;
        if (!THPVariable_CheckExact(arguments[i])) Py_RETURN_TRUE;
        const at::Tensor& tensor = THPVariable_Unpack(arguments[i]);
        if (!tensor.defined() || !is_plain(*tensor.unsafeGetTensorImpl(), state, autocast_rule)) Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
    END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"needs_dispatcher", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(needs_dispatcher)), METH_FASTCALL,
     "needs_dispatcher(autocast_rule, *tensors) -> bool: whether a call must go through torch.ops"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_gate", "C++ gate and memory of calls.", -1, functions};

}  // namespace
}  // namespace tskernel

PyMODINIT_FUNC PyInit__gate() {
    using namespace tskernel;
    if (!ready_type()) return nullptr;
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    if (PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION) < 0 ||
        PyModule_AddObjectRef(module, "Memory", reinterpret_cast<PyObject*>(&MemoryType)) < 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
