// tvm-fuse-embed: a bundle as C. Writes NAME.h, one function for the network, and NAME.cpp, with its files.
//
// The files are taken in by the assembler (.incbin), which is fast and needs no copy of them as text.
#include <cctype>
#include <cstdio>
#include <fstream>
#include <set>

#include "embedded.h"
#include "error.h"
#include "package.h"

namespace {

using namespace tvm_fuse;

struct Argument {
  std::string name;  // a C name
  const Port* port;
  const Tensor* tensor;
};

bool is_name(const std::string& text) {
  for (const unsigned char c : text)
    if (!std::isalnum(c) && c != '_') return false;
  return !text.empty() && !std::isdigit(static_cast<unsigned char>(text[0]));
}

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// Text that cannot end a comment, nor be anything but a comment.
std::string comment(std::string text) {
  for (char& c : text)
    if (!std::isalnum(static_cast<unsigned char>(c)) && std::string(" _-.,:=[]()").find(c) == std::string::npos) c = '?';
  return text;
}

// A path as the assembler and C++ read it, one inside the other.
std::string path_text(const std::string& path) {
  std::string made;
  for (const char c : path) {
    if (c == '"' || c == '\\' || c == '\n')
      throw Error(Status::kUsage, path + ": a path with a quotation mark, a backslash or a line break cannot be embedded");
    made += c;
  }
  return made;
}

// The prefixes keep names apart from those of C, and inputs from outputs.
std::vector<Argument> name_ports(const Bundle& bundle, const std::vector<Port>& ports, const std::string& prefix) {
  std::vector<Argument> made;
  std::set<std::string> taken;
  for (const Port& port : ports) {
    std::string legal = prefix;
    for (const char c : port.name) legal += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
    std::string name = legal;
    for (int number = 2; !taken.insert(upper(name)).second; ++number) name = legal + "_" + std::to_string(number);
    made.push_back({name, &port, &bundle.tensors[port.tensor]});
  }
  return made;
}

std::string make_parameters(const std::vector<Argument>& inputs, const std::vector<Argument>& outputs) {
  std::string made;
  for (const auto* arguments : {&inputs, &outputs}) {
    for (const Argument& argument : *arguments) {
      if (!made.empty()) made += ", ";
      if (arguments == &inputs) made += "const ";
      made += std::string(argument.tensor->dtype->c_type) + " *" + argument.name;
    }
  }
  return made;
}

std::string make_header(const std::string& name, const Bundle& bundle, const std::vector<Argument>& inputs,
                        const std::vector<Argument>& outputs) {
  const std::string guard = upper(name) + "_H";
  std::string made = "/* " + comment(bundle.model) + " as a C function. Made by tvm-fuse-embed; do not edit.\n *\n";
  made += " * source:  " + comment(bundle.source_name) + ", SHA-256 " + comment(bundle.source_sha256) + "\n";
  made += " * target:  " + comment(bundle.target) + "\n *\n";
  made +=
      " * Functions return 0, or: 2 usage, 3 damaged, 4 no driver or no GPU, 5 the driver or a kernel failed, 70 a bug;\n"
      " * " + name + "_last_error() then says more. They may be called from any thread; a lock lets one in at a time.\n"
      " * Arrays are the caller's, in host memory, in C order, with as many elements as their ..._ELEMENTS say.\n"
      " * float16 is passed as its bits (uint16_t). */\n";
  made += "#ifndef " + guard + "\n#define " + guard + "\n\n#include <stdbool.h>\n#include <stdint.h>\n\n";
  for (const auto* arguments : {&inputs, &outputs})
    for (const Argument& argument : *arguments)
      made += "/* " + comment(argument.port->name) + ": " + argument.tensor->text() + " */\n#define " + upper(name) +
              "_" + upper(argument.name) + "_ELEMENTS " + std::to_string(argument.tensor->elements) + "\n";
  made += "\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n\n";
  made += "/* Loads kernels and weights onto a GPU; driver: its file, or NULL for libcuda.so.1. An error when it is\n"
          " * loaded already. Without this call the first run loads them onto GPU 0. */\n";
  made += "int " + name + "_init(int device, const char *driver);\n\n";
  made += "/* Computes all outputs, and returns when they are there. */\n";
  made += "int " + name + "_run(" + make_parameters(inputs, outputs) + ");\n\n";
  made += "/* Frees all memory of the GPU; the network can be loaded again. */\nvoid " + name + "_free(void);\n\n";
  made += "/* What the last call that failed on this thread had to say; valid until the next that fails. */\n";
  made += "const char *" + name + "_last_error(void);\n\n";
  return made + "#ifdef __cplusplus\n}\n#endif\n\n#endif\n";
}

std::string make_list(const std::vector<Argument>& arguments) {
  std::string made;
  for (const Argument& argument : arguments) made += argument.name + ", ";
  return made + "nullptr";
}

struct Source {
  std::string name, path;
};

std::string make_code(const std::string& name, const std::vector<Source>& files, const std::vector<Argument>& inputs,
                      const std::vector<Argument>& outputs) {
  std::string made = "// Made by tvm-fuse-embed; do not edit.\n#include \"" + name +
                     ".h\"\n\n#include \"embedded.h\"\n#include \"tvm_fuse/runner.h\"\n\n";
  std::string table;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string symbol = name + "_tvm_fuse_file_" + std::to_string(i);
    made += "__asm__(\n    \".pushsection .rodata\\n.balign 64\\n.globl " + symbol + "\\n.hidden " + symbol + "\\n" +
            symbol + ":\\n\"\n    \".incbin \\\"" + path_text(files[i].path) + "\\\"\\n.globl " + symbol +
            "_end\\n.hidden " + symbol + "_end\\n" + symbol + "_end:\\n.byte 0\\n.popsection\\n\");\n";
    made += "extern \"C\" __attribute__((visibility(\"hidden\"))) const unsigned char " + symbol + "[], " + symbol +
            "_end[];\n";
    table += "    {\"" + path_text(files[i].name) + "\", " + symbol + ", " + symbol + "_end},\n";
  }
  made += "\nnamespace {\nconst tvm_fuse::EmbeddedFile files[] = {\n" + table + "};\n";
  made += "tvm_fuse::Embedded network(\"" + name + "\", files, " + std::to_string(files.size()) + ");\n}  // namespace\n\n";
  made += "int " + name + "_init(int device, const char *driver) { return network.init(device, driver); }\n";
  made += "int " + name + "_run(" + make_parameters(inputs, outputs) + ") {\n";
  made += "  const void *const inputs[] = {" + make_list(inputs) + "};\n";
  made += "  void *const outputs[] = {" + make_list(outputs) + "};\n  return network.run(inputs, outputs);\n}\n";
  made += "void " + name + "_free(void) { network.free(); }\n";
  return made + "const char *" + name + "_last_error(void) { return tvm_fuse_last_error(); }\n";
}

void write(const std::string& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) throw Error(Status::kUsage, path + ": cannot be written");
}

void embed(const std::string& name, const std::string& folder, const std::string& out, const std::string& image) {
  if (!is_name(name)) throw Error(Status::kUsage, quote(name) + " is no name in C");
  const Package package = open_folder(folder);
  const Bundle& bundle = package.bundle;
  load_parameters(package);  // whatever cannot be read fails here, not where it is deployed
  std::vector<Source> files{{"bundle.json", folder + "/bundle.json"}};
  if (!bundle.is_seeded()) files.push_back({"params.npz", folder + "/params.npz"});
  std::set<std::string> taken;
  if (!image.empty()) {
    files.push_back({kEmbeddedImage, image});
  } else {
    for (const Image& each : bundle.images)
      if (taken.insert(each.file).second) files.push_back({each.file, folder + "/" + each.file});
  }
  const auto inputs = name_ports(bundle, bundle.inputs, "in_"), outputs = name_ports(bundle, bundle.outputs, "out_");
  write(out + "/" + name + ".h", make_header(name, bundle, inputs, outputs));
  write(out + "/" + name + ".cpp", make_code(name, files, inputs, outputs));
}

}  // namespace

int main(int count, char** texts) {
  if (count != 4 && count != 5) {
    std::fputs("usage: tvm-fuse-embed NAME BUNDLE FOLDER [IMAGE]\n\n"
               "Writes NAME.h and NAME.cpp into FOLDER; IMAGE: kernels in place of the bundle's.\n", stderr);
    return static_cast<int>(Status::kUsage);
  }
  try {
    embed(texts[1], texts[2], texts[3], count == 5 ? texts[4] : "");
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.text().c_str());
    return static_cast<int>(error.status);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(Status::kInternal);
  }
}
