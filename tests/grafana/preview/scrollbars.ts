/* The package gives its default export in a way that a bundle for browsers does not find from an .mjs file. */
export { Scrollbars, Scrollbars as default } from '../node_modules/react-custom-scrollbars-2/lib/index.js';
