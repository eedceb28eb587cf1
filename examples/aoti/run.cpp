// Runs a package of AOTInductor without Python: run MODEL.pt2 CALLS RESULTS [LIBRARY]
// CALLS is a list of lists of tensors, as torch.save writes it; RESULTS becomes the list of all results. LIBRARY is
// libtskernel_ops.so, for a package that calls native ops.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

c10::IValue Read(const char* path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    return torch::jit::pickle_load(bytes);
}

void Write(const char* path, const std::vector<at::Tensor>& tensors) {
    const std::vector<char> bytes = torch::jit::pickle_save(c10::IValue(tensors));
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int count, char** argument) {
    if (count != 4 && count != 5) {
        std::cerr << "usage: run MODEL.pt2 CALLS RESULTS [LIBRARY]\n";
        return 2;
    }
    // Loading it registers the ops; the program links to nothing of tskernel.
    if (count == 5 && dlopen(argument[4], RTLD_NOW) == nullptr) {
        std::cerr << dlerror() << '\n';
        return 1;
    }
    const c10::InferenceMode inference;
    torch::inductor::AOTIModelPackageLoader model(argument[1]);
    const c10::IValue calls = Read(argument[2]);
    std::vector<at::Tensor> results;
    for (const c10::IValue& call : calls.toListRef()) {
        std::vector<at::Tensor> inputs;
        for (const c10::IValue& input : call.toListRef()) inputs.push_back(input.toTensor());
        for (const at::Tensor& result : model.run(inputs)) results.push_back(result.cpu());
    }
    Write(argument[3], results);
    std::cout << results.size() << " results\n";
}
