// Runs the inputs of `gate samples export` and writes their outputs: consumer MODEL.onnx SENT OUTPUTS
// Needs tract-onnx = "0.23" and serde_json = "1".
#![allow(unused_unsafe)] // as_bytes is unsafe in some versions of tract
use serde_json::{json, Map, Value};
use std::{env, fs, path::Path};
use tract_onnx::prelude::*;

fn main() -> TractResult<()> {
    let [_, model, sent, out] = &env::args().collect::<Vec<_>>()[..] else {
        panic!("consumer MODEL.onnx SENT OUTPUTS");
    };
    let (sent, out) = (Path::new(sent), Path::new(out));
    let header: Value = serde_json::from_slice(&fs::read(sent.join("samples.json"))?)?;
    fs::create_dir(out)?;
    let mut parts = Map::new();
    for (number, part) in header["parts"].as_array().unwrap().iter().enumerate() {
        let returned = match computed(model, sent, part) {
            Ok(outputs) => written(out, number, outputs)?,
            Err(error) => json!({"failed": format!("{error:#}")}), // never leave a part out
        };
        parts.insert(part["name"].as_str().unwrap().to_string(), returned);
    }
    fs::write(out.join("outputs.json"), json!({"parts": parts}).to_string())?;
    Ok(())
}

/// All outputs of one part, batch by batch: shape and little-endian bytes.
fn computed(model: &str, sent: &Path, part: &Value) -> TractResult<Vec<(Vec<usize>, DatumType, Vec<u8>)>> {
    let size = part["size"].as_u64().unwrap() as usize;
    let batch = part["batch"].as_u64().map_or(size, |batch| batch as usize);
    let (mut inputs, mut graph) = (vec![], tract_onnx::onnx().model_for_path(model)?);
    for (place, input) in part["inputs"].as_array().unwrap().iter().enumerate() {
        let mut shape: Vec<usize> = serde_json::from_value(input["shape"].clone())?;
        shape[0] = batch;
        let kind = datum_type(input["dtype"].as_str().unwrap());
        graph = graph.with_input_fact(place, kind.fact(&shape).into())?;
        inputs.push((shape, kind, fs::read(sent.join(input["raw"].as_str().unwrap()))?));
    }
    let runnable = graph.into_optimized()?.into_runnable()?;
    let mut outputs: Vec<(Vec<usize>, DatumType, Vec<u8>)> = vec![];
    for start in (0..size).step_by(batch) {
        let mut fed = tvec!();
        for (shape, kind, bytes) in &inputs {
            let row = bytes.len() / size;
            let rows = &bytes[start * row..(start + batch) * row];
            fed.push(unsafe { Tensor::from_raw_dt(*kind, shape, rows)? }.into());
        }
        for (place, tensor) in runnable.run(fed)?.iter().enumerate() {
            let bytes = unsafe { tensor.as_bytes() };
            match outputs.get_mut(place) {
                None => outputs.push((tensor.shape().to_vec(), tensor.datum_type(), bytes.to_vec())),
                Some((shape, _, all)) => {
                    shape[0] += tensor.shape()[0];
                    all.extend_from_slice(bytes);
                }
            }
        }
    }
    Ok(outputs)
}

fn written(out: &Path, number: usize, outputs: Vec<(Vec<usize>, DatumType, Vec<u8>)>) -> TractResult<Value> {
    let mut described = vec![];
    for (place, (shape, kind, bytes)) in outputs.iter().enumerate() {
        let file = format!("{number}-{place}.raw");
        fs::write(out.join(&file), bytes)?;
        described.push(json!({"file": file, "dtype": name(*kind), "shape": shape}));
    }
    Ok(json!({ "outputs": described }))
}

const KINDS: [(&str, DatumType); 7] = [
    ("float32", DatumType::F32), ("float64", DatumType::F64), ("int64", DatumType::I64),
    ("int32", DatumType::I32), ("uint8", DatumType::U8), ("int8", DatumType::I8), ("bool", DatumType::Bool),
];

fn datum_type(name: &str) -> DatumType {
    KINDS.iter().find(|kind| kind.0 == name).expect("a dtype of KINDS").1
}

fn name(kind: DatumType) -> &'static str {
    KINDS.iter().find(|pair| pair.1 == kind).expect("a dtype of KINDS").0
}
