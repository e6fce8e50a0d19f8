/* The way from generated C++ to a site. The code finds fx_fusion_call_site through an op of the
 * package's (`cpp_entry.py`), fills in the structure and calls; tensors come as the handles of
 * torch's stable C interface, whose functions the code hands over: nothing of torch's is linked.
 *
 * A call that was learned is launched right here. Any other goes to the site's Python, which gets
 * the tensors as such: a second handle of each is made, which torch turns into a Python object.
 */

/* One call. `cpp_code.py` and `cpp_entry.py` have the same fields. */
typedef struct {
  int64_t bytes;           /* of this structure; tells other versions of it */
  PyObject** site;         /* the code's own word for the site, zero at first */
  const char* description; /* what the site is made of */
  int64_t rows;
  uint64_t stream;
  double numbers[2];       /* eps and scale, */
  int32_t given[2];        /* if they are given; else the site's own */
  int32_t has_stream;      /* the site is one of a GPU */
  int32_t keeps_error;     /* the caller looks at Python's error; else it reads the message */
  void* tensors[kArrays];  /* handles; zero for an absent one */
  int32_t (*address_of)(void* tensor, void** address);
  int32_t (*second_of)(void* tensor, void** handle);
  char message[1024];
} CppCall;

enum { kDone = 0, kRaised = 1, kFailed = 2 };

static PyObject* site_of;    /* a description's site */
static PyObject* tensors_of; /* the tensors of a list of handles, which it takes over */

/* Set what the entry calls; Python calls this before it tells the entry's address. */
void fx_fusion_serve(PyObject* sites, PyObject* tensors) {
  Py_XSETREF(site_of, Py_NewRef(sites));
  Py_XSETREF(tensors_of, Py_NewRef(tensors));
}

/* What a site that `fx_fusion_bind` made holds; 0 for another callable. */
static Entry* entry_of(PyObject* site) {
  if (!PyCFunction_Check(site) || PyCFunction_GET_FUNCTION(site) != method.ml_meth) return 0;
  return (Entry*)PyCapsule_GetPointer(PyCFunction_GET_SELF(site), kCapsule);
}

static int raise_of_torch(const char* function) {
  PyErr_Format(PyExc_RuntimeError, "%s of torch failed; see standard error", function);
  return -1;
}

/* Launch a call that was learned. Returns what fx_fusion_launch does; `raised` tells of an error
 * of Python's. */
static int launch(const Entry* entry, CppCall* call, int* raised) {
  const Site* site = entry->site;
  if (site->call_count == 0 || call->tensors[kScale] != 0) return kOtherCall;
  if (call->tensors[kEps] != 0 && !site->takes_eps_pointer) return kOtherCall;
  const int known = PyDict_Contains(entry->groups, (PyObject*)site->group);
  if (known <= 0) {
    *raised = known < 0;
    return kOtherCall;
  }
  char* arrays[kArrays] = {0};
  for (int i = 0; i < kArrays; ++i)
    if (call->tensors[i] != 0 && call->address_of(call->tensors[i], (void**)&arrays[i]) != 0) {
      *raised = raise_of_torch("aoti_torch_get_data_ptr");
      return kOtherCall;
    }
  return fx_fusion_launch(site, call->stream, call->rows,
                          call->given[0] ? (float)call->numbers[0] : site->eps,
                          call->given[1] ? (float)call->numbers[1] : site->scale, arrays);
}

/* Handles of their own for a call's tensors, in a list of capsules. */
static PyObject* second_handles(const CppCall* call) {
  PyObject* handles = PyList_New(0);
  for (int i = 0; handles != 0 && i < kArrays; ++i) {
    if (call->tensors[i] == 0) continue;
    void* second = 0;
    PyObject* capsule = 0;
    if (call->second_of(call->tensors[i], &second) != 0)
      raise_of_torch("aoti_torch_new_tensor_handle");
    else
      capsule = PyCapsule_New(second, 0, 0);
    if (capsule == 0 || PyList_Append(handles, capsule) != 0) Py_CLEAR(handles);
    Py_XDECREF(capsule);
  }
  return handles;
}

/* Call the site's Python with the tensors, in the order of gpu_site.py or cpu_site.py. */
static int call_python(PyObject* callable, const CppCall* call) {
  PyObject* handles = second_handles(call);
  if (handles == 0) return -1;
  PyObject* tensors = PyObject_CallOneArg(tensors_of, handles);
  Py_DECREF(handles);
  if (tensors == 0) return -1;
  PyObject* by_array[kArrays];
  Py_ssize_t next = 0;
  for (int i = 0; i < kArrays; ++i)
    by_array[i] = call->tensors[i] == 0 ? Py_None : PyList_GetItem(tensors, next++);
  PyObject* numbers[2];
  for (int i = 0; i < 2; ++i) {
    PyObject* tensor = by_array[kEps + i];
    numbers[i] = call->given[i] ? PyFloat_FromDouble(call->numbers[i]) : Py_NewRef(tensor);
  }
  PyObject* stream = PyLong_FromUnsignedLongLong(call->stream);
  PyObject* rows = PyLong_FromLongLong(call->rows);
  PyObject* given[4 + 2 * kInputs] = {stream, rows, numbers[0], numbers[1]};
  memcpy(given + 4, by_array, kInputs * sizeof(PyObject*));
  memcpy(given + 4 + kInputs, by_array + kScale + 1, kInputs * sizeof(PyObject*));
  PyObject* result = 0;
  if (stream != 0 && rows != 0 && numbers[0] != 0 && numbers[1] != 0)
    result = call->has_stream ? PyObject_Vectorcall(callable, given, 4 + 2 * kInputs, 0)
                              : PyObject_Vectorcall(callable, given + 2, 2 + 2 * kInputs, 0);
  for (int i = 0; i < 4; ++i) Py_XDECREF(given[i]);
  Py_DECREF(tensors);
  Py_XDECREF(result);
  return result == 0 ? -1 : 0;
}

/* Make one call; returns minus one with an error of Python's. */
static int call_with_lock(CppCall* call) {
  if (*call->site == 0) /* the code keeps this reference for good */
    *call->site = PyObject_CallFunction(site_of, "s", call->description);
  PyObject* callable = *call->site;
  if (callable == 0) return -1;
  Entry* entry = entry_of(callable);
  if (entry != 0) {
    int raised = 0;
    const int status = launch(entry, call, &raised);
    if (raised) return -1;
    if (status == kLaunched) return 0;
    if (status < 0) {
      raise_of_driver(status);
      return -1;
    }
    callable = entry->slow;
  }
  return call_python(callable, call);
}

/* Python's error as text, and no error any more. */
static void describe_error(char* message, size_t size) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* text = value == 0 ? 0 : PyObject_Str(value);
  const char* words = text == 0 ? 0 : PyUnicode_AsUTF8(text);
  snprintf(message, size, "%s: %s", value == 0 ? "error" : Py_TYPE(value)->tp_name,
           words == 0 ? "" : words);
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
}

/* Make one call, from any thread, with Python's lock or without. */
int32_t fx_fusion_call_site(CppCall* call) {
  if (call->bytes != (int64_t)sizeof(CppCall)) return kFailed;
  PyGILState_STATE state = PyGILState_Ensure();
  int32_t status = kDone;
  if (call_with_lock(call) != 0) {
    status = call->keeps_error ? kRaised : kFailed;
    if (status == kFailed) describe_error(call->message, sizeof(call->message));
  }
  PyGILState_Release(state);
  return status;
}
