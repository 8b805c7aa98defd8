// The rules for the scripts of the page and of the widget: those that eslint recommends, and what a page that holds foreign text must never use.

import js from "@eslint/js";
import globals from "globals";

export default [
  // What is installed in the checkout has scripts of others.
  { ignores: [".venv/", "build/"] },
  js.configs.recommended,
  {
    files: ["src/regard/views/html/*.js", "src/regard/views/widget/*.js", "src/regard/serving/live/*.js", "tests/views/script/*.js"],
    languageOptions: { ecmaVersion: 2024, sourceType: "module", globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "eqeqeq": ["error", "always", { null: "ignore" }],
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-self-compare": "off", // what is not equal to itself is NaN
      "no-control-regex": "off", // SVG cannot hold control characters, which are taken out
      "no-unused-vars": "error",
      "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
      "no-useless-escape": "off", // "<\\/" does not end the element of the page that holds the script
      "no-var": "error",
      "prefer-const": ["error", { destructuring: "all" }],
      "no-restricted-properties": ["error",
        { property: "innerHTML", message: "tokens are text: make elements" },
        { property: "outerHTML", message: "tokens are text: make elements" },
        { property: "insertAdjacentHTML", message: "tokens are text: make elements" }],
    },
  },
  { files: ["tests/views/script/*.js"], languageOptions: { globals: globals.node } },
];
