// Resizes images of one formula by the crate `image`, and prints the pixels as JSON.
//     cargo run --release > vectors.json      (image 0.24.3, default-features = false)
use image::imageops::{resize, FilterType};
use image::{Rgb, RgbImage};

fn pixel(x: u32, y: u32, channel: u32) -> u8 {
    let hash = (x * 73 + y * 151 + channel * 37 + x * y * (channel + 3)) % 256;
    if (x / 5 + y / 7) % 3 == 0 { 255 - (hash / 8) as u8 } else { (hash / (channel + 1)) as u8 }
}

fn main() {
    let sizes = [(37, 29, 11, 8), (7, 5, 16, 13), (64, 48, 32, 24), (33, 50, 40, 20), (90, 3, 9, 3)];
    let filters = [
        ("nearest", FilterType::Nearest),
        ("bilinear", FilterType::Triangle),
        ("bicubic", FilterType::CatmullRom),
    ];
    let mut vectors = Vec::new();
    for (width, height, new_width, new_height) in sizes {
        let image = RgbImage::from_fn(width, height, |x, y| {
            Rgb([pixel(x, y, 0), pixel(x, y, 1), pixel(x, y, 2)])
        });
        for (name, filter) in filters {
            let resized = resize(&image, new_width, new_height, filter);
            let pixels: Vec<String> = resized.as_raw().iter().map(|v| v.to_string()).collect();
            vectors.push(format!(
                "{{\"mode\": \"{}\", \"from\": [{}, {}], \"to\": [{}, {}], \"pixels\": [{}]}}",
                name, height, width, new_height, new_width, pixels.join(",")
            ));
        }
    }
    println!("[\n{}\n]", vectors.join(",\n"));
}
