// Compares objects of Python with their earlier state once a token: modules, their hooks and their weights. In Python
// this comparison of all layers takes longer than some layers do.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "module.hpp"

namespace nb = nanobind;

namespace windlass {
namespace {

constexpr std::size_t AHEAD = 8;  // objects whose memory is fetched before it is read

// A number that each change of a dictionary replaces by another one, or 0 where Python has none. From Python 3.13 on a
// dictionary may share its values with an object, and a change of that leaves the number as it was.
inline std::uint64_t version_of(PyObject *dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return reinterpret_cast<const PyDictObject *>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    (void)dict;
    return 0;
#endif
}

class Watch {
  public:
    // The dictionary has this object, or one equal to it, at the key. A null object means that the key is missing.
    void item(nb::dict dict, nb::object key, nb::object value) { items.push_back({dict, key, value}); }
    void no_item(nb::dict dict, nb::object key) { items.push_back({dict, key, {}}); }
    // The dictionary that another one has at the key is empty.
    void empty(nb::dict dict, nb::object key) { empties.push_back({dict, key, {}}); }
    // The attribute is this object, or equal to it.
    void attribute(nb::object owner, nb::object name, nb::object value) {
        PyObject *dict = PyType_Check(owner.ptr()) ? nullptr : dict_of(owner);
        (dict && PyDict_Contains(dict, name.ptr()) == 1 ? own_attributes : attributes).push_back({owner, name, value});
    }
    void type(nb::object object, nb::object kind) { types.push_back({object, {}, kind}); }
    void address(nb::object tensor) { addresses.push_back({tensor, address_of(tensor)}); }

    bool is_unchanged() {
        for (std::size_t i = 0; i < types.size(); ++i) {
            if (i + AHEAD < types.size()) __builtin_prefetch(types[i + AHEAD].owner.ptr());
            if (reinterpret_cast<PyObject *>(Py_TYPE(types[i].owner.ptr())) != types[i].value.ptr()) return false;
        }
        if (!are_dictionaries_unchanged()) {
            note_dictionaries();  // before they are read, which may run code of others
            if (!are_items_unchanged()) return false;
        }
        for (const Fact &each : attributes)
            if (!is_attribute_unchanged(each)) return false;
        for (std::size_t i = 0; i < addresses.size(); ++i) {
            if (i + AHEAD < addresses.size()) __builtin_prefetch(addresses[i + AHEAD].tensor.ptr());
            if (address_of(addresses[i].tensor) != addresses[i].address) return false;
        }
        return true;
    }

  private:
    struct Fact {
        nb::object owner, name, value;
    };
    struct Memory {
        nb::object tensor;
        std::uint64_t address;
    };
    // A dictionary as it was when all facts held. With an owner: it was the owner's own.
    struct Dictionary {
        nb::object dict, owner;
        std::uint64_t version;
    };
    std::vector<Fact> items, empties, own_attributes, attributes, types;
    std::vector<Memory> addresses;
    std::vector<Dictionary> dictionaries;

    bool are_dictionaries_unchanged() const {
        for (std::size_t i = 0; i < dictionaries.size(); ++i) {
            if (i + AHEAD < dictionaries.size()) {
                __builtin_prefetch(dictionaries[i + AHEAD].dict.ptr());
                if (dictionaries[i + AHEAD].owner.is_valid()) __builtin_prefetch(dictionaries[i + AHEAD].owner.ptr());
            }
            const auto &[dict, owner, version] = dictionaries[i];
            if (!version || version_of(dict.ptr()) != version) return false;
            if (owner.is_valid() && dict_of(owner) != dict.ptr()) return false;
        }
        return !dictionaries.empty();
    }

    void note_dictionaries() {
        dictionaries.clear();
        std::unordered_set<PyObject *> known;
        const auto note = [&](PyObject *dict, const nb::object &owner) {
            if (dict && PyDict_Check(dict) && known.insert(dict).second)
                dictionaries.push_back({nb::borrow(dict), owner, version_of(dict)});
        };
        for (const Fact &each : own_attributes) note(dict_of(each.owner), each.owner);
        for (const Fact &each : items) note(each.owner.ptr(), {});
        for (const Fact &each : empties) {
            note(each.owner.ptr(), {});
            note(PyDict_GetItemWithError(each.owner.ptr(), each.name.ptr()), {});
        }
        PyErr_Clear();
    }

    bool are_items_unchanged() const {
        for (const Fact &each : items)
            if (!is_same(PyDict_GetItemWithError(each.owner.ptr(), each.name.ptr()), each.value)) return false;
        for (const Fact &each : empties) {
            PyObject *found = PyDict_GetItemWithError(each.owner.ptr(), each.name.ptr());
            if (!found || !PyDict_Check(found) || PyDict_Size(found) != 0) return false;
        }
        for (const Fact &each : own_attributes)
            if (!is_attribute_unchanged(each)) return false;
        return true;
    }

    static bool is_attribute_unchanged(const Fact &fact) {
        PyObject *found = PyObject_GetAttr(fact.owner.ptr(), fact.name.ptr());
        if (!found) PyErr_Clear();
        const bool is_as_before = is_same(found, fact.value);
        Py_XDECREF(found);
        return is_as_before;
    }

    // The dictionary with an object's own attributes, or null.
    static PyObject *dict_of(const nb::object &object) {
        PyObject **place = _PyObject_GetDictPtr(object.ptr());
        return place ? *place : nullptr;
    }

    static bool is_same(PyObject *found, const nb::object &value) {
        if (!found) PyErr_Clear();
        if (!found || !value.is_valid()) return !found && !value.is_valid();
        if (found == value.ptr()) return true;
        // Tensors compare number by number.
        if (!PyFloat_CheckExact(found) && !PyLong_CheckExact(found) && !PyUnicode_CheckExact(found)) return false;
        const int is_equal = PyObject_RichCompareBool(found, value.ptr(), Py_EQ);
        if (is_equal < 0) PyErr_Clear();
        return is_equal == 1;
    }

    static std::uint64_t address_of(const nb::object &tensor) {
        static PyObject *const name = PyUnicode_InternFromString("data_ptr");
        return nb::cast<std::uint64_t>(nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), name)));
    }
};

}  // namespace

void bind_watch(nb::module_ &module) {
    nb::class_<Watch>(module, "Watch")
        .def(nb::init<>())
        .def("item", &Watch::item, nb::arg("owner"), nb::arg("key"), nb::arg("value").none())
        .def("no_item", &Watch::no_item)
        .def("empty", &Watch::empty)
        .def("attribute", &Watch::attribute, nb::arg("owner"), nb::arg("name"), nb::arg("value").none())
        .def("type", &Watch::type)
        .def("address", &Watch::address)
        .def("is_unchanged", &Watch::is_unchanged);
}

}  // namespace windlass
