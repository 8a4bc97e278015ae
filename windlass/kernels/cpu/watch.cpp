// Compares objects of Python with their earlier state once a token: modules, their hooks and their weights. In Python
// this comparison of all layers takes longer than some layers do.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "module.hpp"

namespace nb = nanobind;

namespace windlass {
namespace {

constexpr std::size_t AHEAD = 8, KEY_LINES = 5, LINE = 64;  // facts, lines of a module's dictionary, bytes

class Watch {
  public:
    // The dictionary has this object, or one equal to it, at the key. A null object means that the key is missing.
    void item(nb::dict dict, nb::object key, nb::object value) { items.push_back({dict, key, value}); }
    void no_item(nb::dict dict, nb::object key) { items.push_back({dict, key, {}}); }
    // The dictionary that another one has at the key is empty.
    void empty(nb::dict dict, nb::object key) { empties.push_back({dict, key, {}}); }
    // The attribute is this object, or equal to it.
    void attribute(nb::object owner, nb::object name, nb::object value) { attributes.push_back({owner, name, value}); }
    void type(nb::object object, nb::object kind) { types.push_back({object, {}, kind}); }
    void address(nb::object tensor) { addresses.push_back({tensor, address_of(tensor)}); }

    bool is_unchanged() const {
        for (const auto &[tensor, address] : addresses) __builtin_prefetch(tensor.ptr());
        for (const Fact &each : types) __builtin_prefetch(each.owner.ptr());
        for (const Fact &each : types)
            if (reinterpret_cast<PyObject *>(Py_TYPE(each.owner.ptr())) != each.value.ptr()) return false;
        for (std::size_t i = 0; i < items.size(); ++i) {
            fetch_ahead(items, i);
            const Fact &each = items[i];
            if (!is_same(PyDict_GetItemWithError(each.owner.ptr(), each.name.ptr()), each.value)) return false;
        }
        for (std::size_t i = 0; i < empties.size(); ++i) {
            fetch_ahead(empties, i);
            const Fact &each = empties[i];
            PyObject *found = PyDict_GetItemWithError(each.owner.ptr(), each.name.ptr());
            if (found && PyDict_Check(found) && PyDict_Size(found) == 0) continue;
            return false;
        }
        for (const Fact &each : attributes) {
            PyObject *found = PyObject_GetAttr(each.owner.ptr(), each.name.ptr());
            if (!found) PyErr_Clear();
            const bool is_as_before = is_same(found, each.value);
            Py_XDECREF(found);
            if (!is_as_before) return false;
        }
        for (const auto &[tensor, address] : addresses)
            if (address_of(tensor) != address) return false;
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
    std::vector<Fact> items, empties, attributes, types;
    std::vector<Memory> addresses;

    // Weights have driven the dictionaries out of the caches since the token before: fetch those of later facts meanwhile.
    static void fetch_ahead(const std::vector<Fact> &facts, std::size_t at) {
        if (at + 2 * AHEAD >= facts.size()) return;
        __builtin_prefetch(facts[at + 2 * AHEAD].owner.ptr());
        const auto *keys = reinterpret_cast<const char *>(
            reinterpret_cast<const PyDictObject *>(facts[at + AHEAD].owner.ptr())->ma_keys);
        for (std::size_t line = 0; line < KEY_LINES; ++line) __builtin_prefetch(keys + line * LINE);
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
