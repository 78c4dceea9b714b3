/* Pictures that go with a message: read from files, made smaller where the server would refuse them, and shown. */

import { add } from "./rendering.js";
import * as store from "./store.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // what the server reads
const MOST_BYTES = 8 << 20; // of a file: a request has the pictures of its whole conversation, and ends at 48 MB
const MOST_PIXELS = 50e6;
const MOST_SIDE = 16384;
const SMALLER_SIDE = 4096; // of a picture that is made smaller: the model sees 2.6 million pixels at most
const QUALITY = 0.92;
const SHOWN_SIDE = 260; // pixels of a picture in the conversation

function fits(file, { width, height }) {
  const small = file.size <= MOST_BYTES && width * height <= MOST_PIXELS && Math.max(width, height) <= MOST_SIDE;
  return small && TYPES.includes(file.type);
}

/* The picture as a JPEG file, transparent pixels over white. */
async function redrawn(bitmap) {
  const scale = Math.min(1, SMALLER_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}

/* What a message keeps of a file: { id, name, width, height }. The store has its bytes. */
async function read(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new Error(`${file.name} is not a picture that this browser can read.`);
  try {
    // a copy, because the file on the disk may change
    const blob = fits(file, bitmap) ? new Blob([await file.arrayBuffer()], { type: file.type }) : await redrawn(bitmap);
    return { id: store.holdFile(blob), name: file.name, width: bitmap.width, height: bitmap.height };
  } finally {
    bitmap.close();
  }
}

/* Show a picture that a message keeps. Its place has its size before it is loaded. */
export function addPicture(parent, { id, name, width, height }) {
  const picture = add(parent, "img", "picture");
  const scale = Math.min(1, SHOWN_SIDE / Math.max(width, height));
  const [shownWidth, shownHeight] = [width, height].map((side) => Math.max(1, Math.round(side * scale)));
  Object.assign(picture, { width: shownWidth, height: shownHeight, alt: name, title: name });
  store.fileOf(id).then((blob) => {
    if (!blob) return picture.replaceWith(Object.assign(document.createElement("span"), {
      className: "picture gone", textContent: `${name} is not kept in this browser`,
    }));
    picture.addEventListener("load", () => URL.revokeObjectURL(picture.src), { once: true });
    picture.src = URL.createObjectURL(blob);
  });
}

/* The files that go with a message that is being written, as a list of thumbnails with buttons that remove them. */
export class Attachments {
  /* `report` is called with sentences for the user; `field` gets the focus where no thumbnail is left. */
  constructor(parent, field, report, files = []) {
    this.list = parent;
    this.field = field;
    this.report = report;
    this.files = [...files];
    this.show();
  }

  async attach(files) {
    for (const file of files) {
      try {
        this.files.push(await read(file));
        this.report(`${file.name} is attached.`);
      } catch (error) {
        this.report(error.message);
      }
    }
    this.show();
  }

  remove(file) {
    const at = this.files.indexOf(file);
    this.files.splice(at, 1);
    this.show();
    this.report(`${file.name} is removed.`);
    const buttons = this.list.querySelectorAll("button");
    (buttons[Math.min(at, buttons.length - 1)] ?? this.field).focus();
  }

  /* The files; the list is empty afterwards. */
  take() {
    const files = this.files;
    this.files = [];
    this.show();
    return files;
  }

  show() {
    this.list.replaceChildren();
    this.list.hidden = !this.files.length;
    for (const file of this.files) {
      const item = add(this.list, "li", "");
      addPicture(item, file);
      const button = add(item, "button", "remove", "×");
      button.type = "button";
      button.setAttribute("aria-label", `Remove ${file.name}`);
      button.addEventListener("click", () => this.remove(file));
    }
  }
}
