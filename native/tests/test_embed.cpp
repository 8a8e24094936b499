// tvm-fuse-embed: names of C, whatever a model calls things; and what it refuses.
#include <cstdlib>

#include <sys/wait.h>

#include "check.h"
#include "variants.h"

using variants::Folder;

namespace {

std::string program;

int embed(const std::string& name, const std::string& bundle, const std::string& out) {
  const int status = std::system(("'" + program + "' '" + name + "' '" + bundle + "' '" + out + "' 2>/dev/null").c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void test_names() {
  Folder folder("net");
  folder.edit("\"name\": \"image\"", "\"name\": \"int */\\nsystem(\\\"x\\\")\"");
  folder.edit("\"name\": \"scores\"", "\"name\": \"Classes\"");
  check_equal(embed("net", folder.text(), folder.text()), 0, "exit code");
  const std::string header = variants::read(folder.path / "net.h");
  check_contains(header, "int net_run(const float *in_int____system__x__, float *out_classes, float *out_Classes_2);", "signature");
  check_contains(header, "/* int ???system(?x?): float32[1, 2, 6, 6] */", "a name in a comment");
  check_contains(header, "#define NET_OUT_CLASSES_2_ELEMENTS 3", "elements");
}

void test_refusals() {
  Folder folder("net");
  check_equal(embed("1net", folder.text(), folder.text()), 2, "a name");
  check_equal(embed("net", "/no/such/folder", folder.text()), 2, "a folder");
  check_equal(embed("net", folder.text(), "/no/such/folder"), 2, "where to write");
  folder.edit_file("params.npz", "NUMPY", "NUMPI");
  check_equal(embed("net", folder.text(), folder.text()), 3, "a damaged bundle");
}

}  // namespace

int main(int, char** texts) {
  program = texts[1];
  test_names();
  test_refusals();
  return failures;
}
