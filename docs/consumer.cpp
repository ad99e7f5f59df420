// Runs the inputs of `gate samples export` and writes their outputs: consumer MODEL.onnx SENT OUTPUTS
// Needs ONNX Runtime and nlohmann/json: g++ -std=c++17 consumer.cpp -lonnxruntime
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <onnxruntime_cxx_api.h>

using json = nlohmann::json;
namespace fs = std::filesystem;

const std::vector<std::tuple<std::string, ONNXTensorElementDataType, size_t>> KINDS = {
    {"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4}, {"float64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},   {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
    {"uint8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},   {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1},
    {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},
};

auto kind(const std::string& name) {
  for (auto& each : KINDS) if (std::get<0>(each) == name) return each;
  throw std::runtime_error("dtype " + name);
}
auto kind(ONNXTensorElementDataType type) {
  for (auto& each : KINDS) if (std::get<1>(each) == type) return each;
  throw std::runtime_error("dtype " + std::to_string(type));
}

struct Output { std::vector<int64_t> shape; std::string dtype; std::string bytes; };

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

// All outputs of one part, batch by batch, in the order of samples.json.
std::vector<Output> computed(Ort::Session& session, const fs::path& sent, const json& part, const json& outputs) {
  const int64_t size = part["size"], batch = part["batch"].is_null() ? std::min<int64_t>(size, 32) : part["batch"].get<int64_t>();
  std::vector<std::string> names, bytes;
  for (auto& input : part["inputs"]) {
    names.push_back(input["name"]);
    bytes.push_back(read(sent / input["raw"].get<std::string>()));
  }
  std::vector<const char*> in, out;
  for (auto& name : names) in.push_back(name.c_str());
  for (auto& name : outputs) out.push_back(name.get_ref<const std::string&>().c_str());
  auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
  std::vector<Output> all(out.size());
  for (int64_t start = 0; start < size; start += batch) {
    const int64_t count = std::min(batch, size - start);
    std::vector<Ort::Value> fed;
    for (size_t i = 0; i < names.size(); ++i) {
      std::vector<int64_t> shape = part["inputs"][i]["shape"];
      shape[0] = count;
      const size_t row = bytes[i].size() / size;
      auto type = std::get<1>(kind(part["inputs"][i]["dtype"].get<std::string>()));
      fed.push_back(Ort::Value::CreateTensor(memory, bytes[i].data() + start * row, count * row, shape.data(), shape.size(), type));
    }
    auto results = session.Run(Ort::RunOptions{nullptr}, in.data(), fed.data(), fed.size(), out.data(), out.size());
    for (size_t i = 0; i < results.size(); ++i) {
      auto info = results[i].GetTensorTypeAndShapeInfo();
      auto [dtype, type, width] = kind(info.GetElementType());
      auto shape = info.GetShape();
      if (start) all[i].shape[0] += shape[0]; else all[i] = {shape, dtype, {}};
      all[i].bytes.append(static_cast<const char*>(results[i].GetTensorRawData()), info.GetElementCount() * width);
    }
  }
  return all;
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;  // consumer MODEL.onnx SENT OUTPUTS
  const fs::path sent = argv[2], out = argv[3];
  const json header = json::parse(read(sent / "samples.json"));
  Ort::Env env;
  Ort::Session session(env, argv[1], Ort::SessionOptions{});  // with the provider that you serve with
  fs::create_directory(out);
  json parts;
  int number = 0;
  for (auto& part : header["parts"]) {
    json returned;
    try {
      for (auto& output : computed(session, sent, part, header["outputs"])) {
        const auto file = std::to_string(number++) + ".raw";
        std::ofstream(out / file, std::ios::binary) << output.bytes;
        returned["outputs"].push_back({{"file", file}, {"dtype", output.dtype}, {"shape", output.shape}});
      }
    } catch (const std::exception& error) {
      returned = {{"failed", error.what()}};  // never leave a part out
    }
    parts[part["name"].get<std::string>()] = returned;
  }
  std::ofstream(out / "outputs.json") << json::object({{"parts", parts}});
}
