/* Pictures and sounds that go with a message: read from files, made smaller where the server would refuse them, and shown. */

import { add } from "./rendering.js";
import { soundOf } from "./sounds.js";
import * as store from "./store.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // what the server reads
export const MOST_BYTES = 8 << 20; // of a file: a request has the files of its whole conversation, and ends at 48 MB
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

/* What a message keeps of a file: { id, name, width, height } of a picture, { id, name, sound: true } of a sound. The store has
its bytes. `reads` tells what the model reads: { vision, audio }. */
async function read(file, reads) {
  const isSound = file.type.startsWith("audio/");
  if (!reads[isSound ? "audio" : "vision"]) throw new Error(`This model reads no ${isSound ? "sounds" : "pictures"}.`);
  return isSound ? readSound(file) : readPicture(file);
}

async function readSound(file) {
  const blob = await soundOf(file, MOST_BYTES).catch(() => null);
  if (!blob) throw new Error(`${file.name} is not a sound that this browser can read.`);
  return keptSound(blob, file.name);
}

/* What a message keeps of a sound. */
export function keptSound(blob, name) {
  if (blob.size > MOST_BYTES) throw new Error(`${name} is longer than four minutes.`);
  return { id: store.holdFile(blob), name, sound: true };
}

async function readPicture(file) {
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

/* Show a file that a message keeps. Its place has its size before it is loaded. */
export function addFile(parent, { id, name, width, height, sound }) {
  const shown = add(parent, sound ? "audio" : "img", sound ? "sound" : "picture");
  shown.title = name;
  if (sound) Object.assign(shown, { controls: true, ariaLabel: name });
  else sizePicture(shown, name, width, height);
  store.fileOf(id).then((blob) => {
    if (blob) {
      shown.src = URL.createObjectURL(blob);
      if (!sound) shown.addEventListener("load", () => URL.revokeObjectURL(shown.src), { once: true });
    } else {
      const gone = document.createElement("span");
      shown.replaceWith(Object.assign(gone, { className: "gone", textContent: `${name} is not kept in this browser` }));
    }
  });
}

function sizePicture(picture, name, width, height) {
  const scale = Math.min(1, SHOWN_SIDE / Math.max(width, height));
  const [shownWidth, shownHeight] = [width, height].map((side) => Math.max(1, Math.round(side * scale)));
  Object.assign(picture, { width: shownWidth, height: shownHeight, alt: name });
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

  async attach(files, reads) {
    for (const file of files) await this.attachOne(() => read(file, reads));
  }

  /* Attach what `make` returns, or report why it throws. */
  async attachOne(make) {
    try {
      const file = await make();
      this.files.push(file);
      this.report(`${file.name} is attached.`);
    } catch (error) {
      this.report(error.message);
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
      addFile(item, file);
      const button = add(item, "button", "remove", "×");
      button.type = "button";
      button.setAttribute("aria-label", `Remove ${file.name}`);
      button.addEventListener("click", () => this.remove(file));
    }
  }
}
