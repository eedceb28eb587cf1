// Runs a model that AOTInductor packaged, without Python: run MODEL.so CALLS RESULTS
// CALLS is a list of lists of tensors, as torch.save writes it; RESULTS becomes the list of all results.
#include <torch/csrc/jit/serialization/pickle.h>
#ifdef WITH_CUDA
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cuda.h>
using Runner = torch::inductor::AOTIModelContainerRunnerCuda;
constexpr const char* kDevice = "cuda";
#else
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
using Runner = torch::inductor::AOTIModelContainerRunnerCpu;
#endif

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
    if (count != 4) {
        std::cerr << "usage: run MODEL.so CALLS RESULTS\n";
        return 2;
    }
    const c10::InferenceMode inference;
    const std::string model = argument[1];
#ifdef WITH_CUDA
    // The compiled Triton kernels lie beside the library.
    Runner runner(model, 1, kDevice, model.substr(0, model.rfind('/')));
#else
    Runner runner(model);
#endif
    const c10::IValue calls = Read(argument[2]);
    std::vector<at::Tensor> results;
    for (const c10::IValue& call : calls.toListRef()) {
        std::vector<at::Tensor> inputs;
        for (const c10::IValue& input : call.toListRef()) inputs.push_back(input.toTensor());
        for (const at::Tensor& result : runner.run(inputs)) results.push_back(result.cpu());
    }
    Write(argument[3], results);
    std::cout << results.size() << " results\n";
}
