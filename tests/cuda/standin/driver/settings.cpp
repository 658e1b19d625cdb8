#include "device.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace device {

Counters counters{};
std::recursive_mutex mutex;

namespace {

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}

std::FILE* opened() {
  const char* path = std::getenv("STANDIN_LOG");
  return path && *path ? std::fopen(path, "a") : nullptr;
}

typedef void (*Hook)(int what, long long number, const char* name);
Hook hook = nullptr;

} // namespace

int devices() {
  static int found = (int)setting("STANDIN_DEVICES", 2);
  return found;
}

int capability() {
  static int found = (int)setting("STANDIN_CC", 90);
  return found;
}

int processors() {
  static int found = (int)setting("STANDIN_SMS", 132);
  return found;
}

size_t total() {
  static size_t found = (size_t)setting("STANDIN_MIB", 143155) << 20;
  return found;
}

bool folds_large() {
  static bool found = setting("STANDIN_FOLD", 0);
  return found;
}

int shared_memory() {
  return capability() == 80 ? 166912 : capability() == 120 ? 101376 : 232448;
}

std::string name() {
  return "stand-in, no GPU (as sm_" + std::to_string(capability()) + ")";
}

void log(const char* format, ...) {
  static std::FILE* file = opened();
  if (!file) return;
  va_list values;
  va_start(values, format);
  std::vfprintf(file, format, values);
  va_end(values);
  std::fputc('\n', file);
  std::fflush(file);
}

void tell(What what, long long number, const char* name) {
  if (hook) hook(what, number, name);
}

} // namespace device

using namespace device;

extern "C" {

void standin_counters(Counters* into) {
  *into = counters;
}

void standin_reset() {
  long long held = counters.bytes;
  counters = Counters{};
  counters.bytes = counters.peak = held;
}

void standin_set_hook(Hook given) {
  hook = given;
}

void standin_missing(const char* name) { // called by what ../build.py writes
  log("NOT THERE: %s", name);
}
}
